"""The programs: one verb each, configured by Hydra from ``conf/`` or by options of their own.

Decided here: what ``train`` and ``evaluate`` do with a configuration (`build`, `report` and their
neighbours), and ``env`` and ``new``, a file each. What surrounds a run of either is in `run`; the
larger verbs have rooms of their own: `doctor`, `estimate` and `plan`.

Only this subpackage imports hydra; it also needs the extra ``examples`` (rich, scikit-learn).
"""
