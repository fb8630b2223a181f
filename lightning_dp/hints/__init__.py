"""Hints: lines for people, said once, and those of Lightning that are left out.

Decided here: whether fewer devices would be faster (`fewer_devices`) or more could be used
(`more_devices`), and what any Trainer says that is not about the program (`adverts`).
"""

from lightning_dp.hints.adverts import leave_out as leave_out
from lightning_dp.hints.fewer_devices import FewerDevicesHint as FewerDevicesHint
from lightning_dp.hints.more_devices import hint_more_devices as hint_more_devices
from lightning_dp.hints.more_devices import on_purpose as on_purpose
