"""What runs and validations report outside Tidemark.

Modules::

    facets       the datasets and the facts of a run or a validation
    openlineage  the same in OpenLineage's words
    statistics   the counts of runs for Airflow's own statistics
"""
