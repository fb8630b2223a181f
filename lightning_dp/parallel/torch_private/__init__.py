"""Private names of torch: all that the package uses stand here, and nowhere else.

Decided here: how one is asked for (`found`) and what becomes of us if a release has it no longer:
an error that ends the import and tells the name and the release, unless it is said at the name; how
a function of torch's is replaced for a while (`substitute`). Of which part of torch they are, the
file says: `modules`, `tensors` and their `storage`, `hooks` of parameters, `autograd`, the `nodes`
of its graphs and what they tell of `losses` and of `mixing` samples, `modes`, `checkpoint`,
`compile`, `parametrize`. What the simulated devices ask for is theirs.
"""

from lightning_dp.parallel.torch_private.autograd import Functions as Functions
from lightning_dp.parallel.torch_private.autograd import at_end_of_backward as at_end_of_backward
from lightning_dp.parallel.torch_private.autograd import backward_id as backward_id
from lightning_dp.parallel.torch_private.autograd import backwards_go_to as backwards_go_to
from lightning_dp.parallel.torch_private.autograd import is_in_backward as is_in_backward
from lightning_dp.parallel.torch_private.autograd import is_profiling as is_profiling
from lightning_dp.parallel.torch_private.autograd import keeps_graph as keeps_graph
from lightning_dp.parallel.torch_private.autograd import renew_engine as renew_engine
from lightning_dp.parallel.torch_private.autograd import (
    saved_tensors_functions as saved_tensors_functions,
)
from lightning_dp.parallel.torch_private.autograd import will_run as will_run
from lightning_dp.parallel.torch_private.checkpoint import watch_checkpoints as watch_checkpoints
from lightning_dp.parallel.torch_private.compile import COMPILED_CALL as COMPILED_CALL
from lightning_dp.parallel.torch_private.compile import before_compiling as before_compiling
from lightning_dp.parallel.torch_private.compile import compilation_counts as compilation_counts
from lightning_dp.parallel.torch_private.compile import compiled_forward as compiled_forward
from lightning_dp.parallel.torch_private.compile import compiled_function as compiled_function
from lightning_dp.parallel.torch_private.compile import compiled_inner as compiled_inner
from lightning_dp.parallel.torch_private.compile import graphs_of_thread as graphs_of_thread
from lightning_dp.parallel.torch_private.compile import more_recompilations as more_recompilations
from lightning_dp.parallel.torch_private.compile import not_compiled as not_compiled
from lightning_dp.parallel.torch_private.compile import one_invocation as one_invocation
from lightning_dp.parallel.torch_private.compile import with_cells as with_cells
from lightning_dp.parallel.torch_private.found import found as found
from lightning_dp.parallel.torch_private.hooks import ParameterHooks as ParameterHooks
from lightning_dp.parallel.torch_private.hooks import accumulation_hooks as accumulation_hooks
from lightning_dp.parallel.torch_private.hooks import gradient_hooks as gradient_hooks
from lightning_dp.parallel.torch_private.hooks import hooked as hooked
from lightning_dp.parallel.torch_private.hooks import hooks_of as hooks_of
from lightning_dp.parallel.torch_private.hooks import put_hooks_back as put_hooks_back
from lightning_dp.parallel.torch_private.hooks import take_hooks_off as take_hooks_off
from lightning_dp.parallel.torch_private.losses import Reduced as Reduced
from lightning_dp.parallel.torch_private.losses import divisors_of_means as divisors_of_means
from lightning_dp.parallel.torch_private.losses import terms_of as terms_of
from lightning_dp.parallel.torch_private.mixing import mixed_samples as mixed_samples
from lightning_dp.parallel.torch_private.modes import NO_MODES as NO_MODES
from lightning_dp.parallel.torch_private.modes import Modes as Modes
from lightning_dp.parallel.torch_private.modes import count_dispatch_modes as count_dispatch_modes
from lightning_dp.parallel.torch_private.modes import count_function_modes as count_function_modes
from lightning_dp.parallel.torch_private.modes import current_modes as current_modes
from lightning_dp.parallel.torch_private.modes import entries_of as entries_of
from lightning_dp.parallel.torch_private.modules import FIXED_NAMES as FIXED_NAMES
from lightning_dp.parallel.torch_private.modules import HOOK_TABLES as HOOK_TABLES
from lightning_dp.parallel.torch_private.modules import BatchNorm as BatchNorm
from lightning_dp.parallel.torch_private.modules import buffer_table as buffer_table
from lightning_dp.parallel.torch_private.modules import (
    check_batch_norm_input as check_batch_norm_input,
)
from lightning_dp.parallel.torch_private.modules import child_table as child_table
from lightning_dp.parallel.torch_private.modules import copy_hook_tables as copy_hook_tables
from lightning_dp.parallel.torch_private.modules import format_versions as format_versions
from lightning_dp.parallel.torch_private.modules import has_backward_hooks as has_backward_hooks
from lightning_dp.parallel.torch_private.modules import hook_tables as hook_tables
from lightning_dp.parallel.torch_private.modules import is_extra_state as is_extra_state
from lightning_dp.parallel.torch_private.modules import parameter_table as parameter_table
from lightning_dp.parallel.torch_private.modules import set_format_versions as set_format_versions
from lightning_dp.parallel.torch_private.modules import tables_as_attributes as tables_as_attributes
from lightning_dp.parallel.torch_private.parametrize import cached_values as cached_values
from lightning_dp.parallel.torch_private.storage import add_as_read as add_as_read
from lightning_dp.parallel.torch_private.storage import is_alone_in_memory as is_alone_in_memory
from lightning_dp.parallel.torch_private.storage import uses as uses
from lightning_dp.parallel.torch_private.storage import uses_of_memory as uses_of_memory
from lightning_dp.parallel.torch_private.tensors import add_to_each as add_to_each
from lightning_dp.parallel.torch_private.tensors import copy_to_each as copy_to_each
from lightning_dp.parallel.torch_private.tensors import flattened as flattened
from lightning_dp.parallel.torch_private.tensors import norm_of_each as norm_of_each
from lightning_dp.parallel.torch_private.tensors import version as version
