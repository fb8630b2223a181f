"""Reduce: the backward of a joint loss, and what of it reaches the root.

`reducer` shows the flow; while a backward runs on accelerators, `overlap` sends gradients;
`buffers` says which buffers the root gets.
"""

from lightning_dp.parallel.reduce.buffers import BUFFERS as BUFFERS
from lightning_dp.parallel.reduce.buffers import Buffers as Buffers
from lightning_dp.parallel.reduce.buffers import BufferSnapshot as BufferSnapshot
from lightning_dp.parallel.reduce.reducer import JointBackward as JointBackward
from lightning_dp.parallel.reduce.reducer import Reducer as Reducer
from lightning_dp.parallel.reduce.reducer import StashedGradients as StashedGradients
from lightning_dp.parallel.reduce.reducer import SuspendedHooks as SuspendedHooks
from lightning_dp.parallel.reduce.reducer import clear_gradients as clear_gradients
from lightning_dp.parallel.reduce.reducer import reduce_gradients as reduce_gradients
from lightning_dp.parallel.reduce.reducer import single_threaded as single_threaded
from lightning_dp.parallel.reduce.reducer import wait_for_autograd as wait_for_autograd
