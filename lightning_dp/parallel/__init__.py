"""The engine: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`engine` is the flow, and `parts` what it is made of. Each question that it raises has a wing: what
is a `batch`; how many samples does each device get, `split`; the module on every device,
`replicas`; where calls run, `workers`; the loss and its `gradients`; copies between devices,
`links`; several `processes`. Needs torch alone.

What runs on a replica, and what becomes of its result, is a `call`: of step mode (`step`), manual
optimisation (`manual`) or forward mode (`forward`). Around the flow stands `out_of_memory`: a step
that did not fit runs again. For plain PyTorch there are `data_parallel`, its `stages`, and the
`primitives`. `devices` and `checks` are of what users give; of a step there are the gradients that
replicas see in it (`followed_gradients`), the losses of several processes' steps in forward mode
(`forward_losses`), its times (`meter`, `step_meter`) and `ranges`, and whether it fits the root
alone (`root_memory`); `contexts`, which end whatever comes through them, attributes that are others
for a while among them, and those that are `generated`; `errors` of other people's code and their
`likely_cause`; private names of torch, `torch_private`.
"""
