"""Objects in the memory of a cluster, kept by Mooncake Store.

``place``   where its master is, and how to reach it
``client``  one client per process and cluster
``keeper``  the keeper
"""
