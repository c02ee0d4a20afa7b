"""The driver's process, as its caller sees it.

Modules::

    applications   applications on YARN and Kubernetes: their state, and their end
    call           calls a function in the driver's environment
    environment    the Python environment of drivers
    keeper_client  requests to the keeper, which forks drivers
    launch         starts a driver and follows its attempt's row
    on_cluster     follows a driver on a cluster
    process        a child process that never outlives its parent
    submission     submits a driver to a cluster, with what it needs there
"""
