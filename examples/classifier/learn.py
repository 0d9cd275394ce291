#!/usr/bin/env python3
"""An external classifier for tidegate: learns how fast clients usually ask, and blocks those that ask far faster.

    tidegate run --config site.toml        # with [defence] external = "/run/tidegate/classifier.sock"
    python3 learn.py /run/tidegate/classifier.sock

What is usual is learned online: mean and deviation of the requests of a client within a second, as exponentially
weighted averages. The protocol is in docs/protocol/classifier.md. Needs Python 3 and nothing else.
"""

import json
import socket
import sys

WEIGHT = 0.02        # of a new observation
DEVIATIONS = 6.0     # beyond the mean a client is blocked
LEARN = 50           # observations before anybody is judged
LEAST = 20           # requests within a second that nobody is blocked for
BLOCK_S = 600
MAX_CLIENTS = 100_000


class Usual:
    """Mean and variance, exponentially weighted (West 1979)."""

    def __init__(self):
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def limit(self):
        if self.count < LEARN:
            return float("inf")
        return max(LEAST, self.mean + DEVIATIONS * self.variance ** 0.5)

    def learn(self, value):
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)


def main(path):
    tidegate = socket.socket(socket.AF_UNIX)
    tidegate.connect(path)
    usual, counts, second, blocked = Usual(), {}, None, set()
    for line in tidegate.makefile("rb"):
        event = json.loads(line)
        if event["event"] != "request":
            continue
        if event["ms"] // 1000 != second:
            # What is beyond the limit teaches nothing: an attack must not become what is usual.
            for count in counts.values():
                if count <= usual.limit():
                    usual.learn(count)
            second = event["ms"] // 1000
            counts.clear()
        client = event["client"]
        if len(counts) < MAX_CLIENTS or client in counts:
            counts[client] = counts.get(client, 0) + 1
        if counts.get(client, 0) > usual.limit() and client not in blocked:
            if len(blocked) >= MAX_CLIENTS:
                blocked.clear()
            blocked.add(client)
            order = {"block": client, "for_s": BLOCK_S, "reason": f"{counts[client]} requests within a second"}
            tidegate.sendall(json.dumps(order).encode() + b"\n")
            print(f"blocked {client}: {order['reason']}, usual are {usual.mean:.1f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: learn.py SOCKET")
    try:
        main(sys.argv[1])
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]}: {error}")
