"""A model repository on several machines: providers that keep it, and who finds what where.

``base``       the contract of one provider
``placement``  which providers a model's head and each tensor belong to
``local``      a provider in this process, over a folder or memory: ``heads`` and ``parts``
``remote``     a provider behind a connection: ``link`` dials it, ``staging`` passes memory to it
``server``     serves a provider: a ``session`` per connection, ``taking`` and ``sending`` bytes
``wire``       what both sides say to each other
``rights``     who may do what
``serving``    the program, from its settings to its end
"""
