from tests.moon import moon, moon_place
from tests.weed import place, weed

__all__ = ["moon", "moon_place", "place", "weed"]
