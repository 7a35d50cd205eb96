"""Help for testing training code, ours or a user's.

ranks      run a function on N real ranks, and look at what each of them experienced
machines   network namespaces as machines, with links of a given rate
faults     make something go wrong at a named point
workloads  seeded models with data they can learn
hygiene    what a test may not leave behind

Import the module you need: ``from sapwood.testing import ranks``. Nothing is imported here, because
torch is slow to import and not all of these need it.
"""
