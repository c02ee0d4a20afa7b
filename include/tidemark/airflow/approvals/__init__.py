"""Shared by the DAGs with a form.

Modules::

    form          the check of the input, the request for an approval, the wait for its answer
    records_form  the part that chooses failed records, for `discard` and `redrive`
    rewind_form   the form of `rewind`, and the check of its input
"""
