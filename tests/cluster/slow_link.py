"""Makes a link of a node slow and lossy until the end of the input: slow_link.py PORT DELAY LOSS.

Frames between the port of the node and the bridge pass through this process, which needs a kernel
with /dev/net/tun, but not with the queueing discipline netem.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
LONGEST_FRAME = 65536


def ip(*words: str) -> None:
    subprocess.run(["ip", "link", *words], check=True)


def open_end(name: str, bridge: str) -> int:
    """One end of the link, a port of a bridge: what the kernel sends into it is read here."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    ip("set", name, "master", bridge, "up")
    return end


def forward(ends: list[int], delay: float, loss: float) -> None:
    """Forwards frames between both ends until the input ends.

    Args:
        ends: Their descriptors.
        delay: Seconds for which a frame is on its way.
        loss: Probability that a frame is lost.
    """
    draw = random.Random(0)
    on_their_way = deque[tuple[float, int, bytes]]()
    while True:
        wait = on_their_way[0][0] - time.monotonic() if on_their_way else None
        ready, _, _ = select.select([0, *ends], [], [], None if wait is None else max(0.0, wait))
        if 0 in ready:
            return
        now = time.monotonic()
        for end in ready:
            frame = os.read(end, LONGEST_FRAME)
            other = ends[1 - ends.index(end)]
            if draw.random() >= loss:
                on_their_way.append((now + delay, other, frame))
        while on_their_way and on_their_way[0][0] <= now:
            _, end, frame = on_their_way.popleft()
            os.write(end, frame)


def main(port: str, delay: str, loss: str) -> None:
    ip("add", "slow", "type", "bridge")
    ip("set", "slow", "up")
    ends = [open_end("slow-0", "slow"), open_end("slow-1", "bridge")]
    ip("set", port, "master", "slow")
    print("ready", flush=True)
    forward(ends, float(delay), float(loss))
    ip("set", port, "master", "bridge")
    ip("del", "slow")


if __name__ == "__main__":
    main(*sys.argv[1:])
