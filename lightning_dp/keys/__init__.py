"""Keys: which names in two state dicts mean the same.

Decided here: which prefixes are those of wrappers and not a child's name (`matching`, by the `tree`
of a module's keys), and how keys are renamed (`renaming`, `state_dicts`). Strings and state dicts.
"""

from lightning_dp.keys.matching import bare as bare
from lightning_dp.keys.matching import match_keys as match_keys
from lightning_dp.keys.renaming import Renaming as Renaming
from lightning_dp.keys.renaming import add_prefix as add_prefix
from lightning_dp.keys.renaming import as_they_are as as_they_are
from lightning_dp.keys.renaming import shared_prefix as shared_prefix
from lightning_dp.keys.renaming import strip_prefix as strip_prefix
from lightning_dp.keys.state_dicts import PREFIXES as PREFIXES
from lightning_dp.keys.state_dicts import keys_of as keys_of
from lightning_dp.keys.state_dicts import normalize_state_dict as normalize_state_dict
from lightning_dp.keys.state_dicts import renamed as renamed
from lightning_dp.keys.state_dicts import renaming_like as renaming_like
from lightning_dp.keys.state_dicts import with_ties as with_ties
