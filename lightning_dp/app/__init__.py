"""The programs: train and evaluate, configured by Hydra from ``conf/``.

Only this subpackage imports hydra; it also needs the extra ``examples`` (rich, scikit-learn).
"""
