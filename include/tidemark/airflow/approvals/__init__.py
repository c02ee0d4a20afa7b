"""The DAGs that people start with a form.

Modules::

    form          fields that forms share, the check of unknown keys
    records_form  the forms of `discard` and `redrive`, which choose failed records, and the check of their input
    review        the builder of these DAGs: plan, request for an approval, apply
    rewind_form   the form of `rewind`, and the check of its input
"""
