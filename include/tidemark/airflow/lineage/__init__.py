"""Reports of runs and validations to systems outside Tidemark.

Modules::

    facets       the datasets and the facts of a run or a validation
    openlineage  the same as OpenLineage's classes
    statistics   the counts of runs for Airflow's own statistics
"""
