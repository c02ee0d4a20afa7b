"""The driver's process, as its caller sees it.

Modules::

    call           calls a function in the driver's environment
    environment    the Python environment of drivers
    keeper_client  requests to the keeper, which forks drivers
    launch         starts a driver and follows its attempt's row
    process        a child process that never outlives its parent
"""
