"""A device that is not the CPU, with the CPU's memory and kernels, for tests without hardware.

It is torch's backend for devices that torch does not know, named `fakedev`, with an accelerator of
DeepSpeed's and a communication backend. It shows what would fail on any accelerator but the CPU:
host tensors next to device tensors, names of devices, waiting for the device, copies that are used
before they are complete. It has no kernels of its own and computes in order, so that it cannot show
wrong kernels, errors that a device reports late, or memory that does not suffice.
"""
