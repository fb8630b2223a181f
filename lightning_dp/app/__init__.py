"""The verbs ``train`` and ``evaluate``, configured by Hydra from ``conf/``.

Only this subpackage imports hydra. scikit-learn and matplotlib are imported where they are used, so
that it starts without them.
"""
