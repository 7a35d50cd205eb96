from tests.weed import place, weed

__all__ = ["place", "weed"]
