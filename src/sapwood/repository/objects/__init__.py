"""A repository that consists of objects of a keeper alone: in a bucket, or on a network folder.

``layout``     which objects there are, and how each tells that it is damaged
``journal``    the log of each model; who wins
``view``       what the logs say, as tables in memory
``head``       one version: manifest, and where its tensors lie
``blobs``      numbers of tensors in this process, and reading them
``saving``     sharing what is there, writing what is new
``sweeping``   gc
``verifying``  verify
"""
