"""A model repository on several machines: providers that keep it, and who finds what where.

``base``       the contract of one provider
``placement``  which providers a model's head and each tensor belong to
"""
