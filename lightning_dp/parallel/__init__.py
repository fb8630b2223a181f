"""The engine: plan -> scatter -> replicate -> apply -> gather -> backward -> reduce.

`engine` is the flow. Each question that it raises has a wing: what is a `batch`; how many samples
does each device get, `split`; the module on every device, `replicas`; where calls run, `workers`;
the loss and its `gradients`; copies between devices, `links`. Needs torch alone.
"""
