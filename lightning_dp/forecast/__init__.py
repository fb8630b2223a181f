"""Forecast: what a training step would take on machines that are not here. Numbers alone.

Decided here: what numbers with units mean (`units`), what messages between devices and machines
cost (`costs`), how much of it a backward hides (`overlap`), how long all wait for the last one
(`waiting`), what a device has to hold (`memory`); of these a step of ours, of DDP and of FSDP
(`step`), from one that was measured (`measured`); from 1 to 1,024 machines what binds, and what
would do better (`better`), as a `picture`.
"""

from lightning_dp.forecast.better import Row as Row
from lightning_dp.forecast.better import Setting as Setting
from lightning_dp.forecast.better import advice as advice
from lightning_dp.forecast.better import forecast as forecast
from lightning_dp.forecast.costs import ALL_REDUCES as ALL_REDUCES
from lightning_dp.forecast.costs import GATHERS as GATHERS
from lightning_dp.forecast.costs import Link as Link
from lightning_dp.forecast.costs import all_reduce as all_reduce
from lightning_dp.forecast.costs import gather as gather
from lightning_dp.forecast.measured import Measured as Measured
from lightning_dp.forecast.measured import read as read
from lightning_dp.forecast.memory import OPTIMIZERS as OPTIMIZERS
from lightning_dp.forecast.memory import Memory as Memory
from lightning_dp.forecast.picture import draw as draw
from lightning_dp.forecast.step import Cluster as Cluster
from lightning_dp.forecast.step import Job as Job
from lightning_dp.forecast.step import Step as Step
from lightning_dp.forecast.step import job_of as job_of
from lightning_dp.forecast.step import ours as ours
from lightning_dp.forecast.units import count as count
from lightning_dp.forecast.units import digits as digits
from lightning_dp.forecast.units import rate as rate
from lightning_dp.forecast.units import seconds as seconds
from lightning_dp.forecast.units import shown_bytes as shown_bytes
from lightning_dp.forecast.units import shown_time as shown_time
from lightning_dp.forecast.units import size as size
