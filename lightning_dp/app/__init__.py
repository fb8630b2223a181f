"""The verbs ``train`` and ``evaluate``, configured by Hydra from ``conf/``.

Decided here: what they do with a configuration (`build`, `report` and their neighbours). What
surrounds a run of either is in `run`.

Only this subpackage imports hydra. rich, scikit-learn and matplotlib are imported where they are
used, so that it starts without them.
"""
