"""A window on one device: add micro-batches, close, divide once.

Nothing here knows a mesh, a plan or `jit`. Read in this order:

1. `state.py`: what a window holds between calls.
2. `schedule.py`: when a window closes.
3. `loss.py`: the arguments and the return value of a loss, `(loss_sum, num_tokens)`.
4. `model_state.py`: what a loss changes besides parameters.
5. `sums.py`: how the sum of each parameter adds up, and in which dtype.
6. `contribution.py`: what a micro-batch adds, checked, weighted, rejected or not.
7. `accumulation.py`: `add` and `close`, which every way into the library shares.
8. `backward.py`: a backward pass that adds to the sums by itself.
9. `body.py`: what every way with a loss does with a micro-batch.
10. `layout.py`: where the sums live, and how devices talk. What they do over several
    devices is in `_devices/`.

`overwritten.py` (parameters that their gradient overwrites), `trees.py` (looking into
trees and states), `arrays.py` (donation), `dependence.py` (reading traced functions)
and `checks.py` (errors about constructors' arguments) help them.
"""
