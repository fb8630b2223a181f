"""The engine: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`engine` shows the flow. The folders are its stages: how many samples each device gets (`split`),
how a batch is read, cut and moved (`scatter`), one copy of the module per device (`replicate`),
threads and rendezvous (`apply`), how outputs are joined (`gather`), the joint loss and the sums of
gradients (`reduce`). Beside them: copies between devices (`comm`) and several
`processes`. Imports torch only.

What runs on a replica is a call of step mode (`step`) or forward mode (`forward`). A step that did
not fit runs again: `out_of_memory`. The stages as functions, for plain PyTorch: `functional`.
Helpers: `devices`, `checks` of options, `usage` (samples, seconds, memory), `errors`, `contexts`;
private names of torch are in `torch_private`.
"""
