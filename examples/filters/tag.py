#!/usr/bin/env python3
"""A filter in Python: marks each request with a field, and refuses what is asked for under a path.

tidegate condition --listen :8080 --filter persist --filter ./tag.py=value=seen,forbid=/private -- COMMAND...

Nothing is needed but the standard library and, to refuse, the compiler's libatomic (Debian: libatomic1), because Python has no
compare-and-swap. The protocol is described in docs/protocol/filter.md.
"""

import ctypes
import mmap
import os
import select
import socket
import struct
import sys

HEADER = struct.Struct("<4sBBHIIQQIIIBBH16s")  # 64 bytes
NOTICE = struct.Struct("<4sBBHII")  # 16 bytes
BUNDLE, CLOSED_LOCALLY, CLOSED_FOR_ALL, HAND_AGAIN = 1, 2, 3, 4
REWRITTEN, MEMORY_FILE = 1, 2
INLINE_BYTES = 32 * 1024
HELD, ENDED_FOR_ALL, ACCEPTED_BY_ONE = 1, 4, 6  # states in the ledger
ASKED = 1 << 22


class Ledger:
    """Says whose a request is."""

    def __init__(self, file):
        self.map = mmap.mmap(file, 0)
        # As an item: a name that starts so would be this class's own.
        self.compare_exchange = ctypes.CDLL("libatomic.so.1")["__atomic_compare_exchange_8"]
        self.compare_exchange.restype = ctypes.c_bool
        self.compare_exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]

    def change(self, slot, generation, before, after, low=0, kept=0):
        """From one state into another, unless the presentation has left the first; bits of `kept` stay as they are."""
        word = ctypes.c_uint64.from_buffer(self.map, 16 + 16 * slot)
        known = ctypes.c_uint64(word.value)
        while known.value >> 24 == generation << 8 | before:
            wanted = generation << 32 | after << 24 | low | known.value & kept
            # What is there instead is known after a failure.
            if self.compare_exchange(ctypes.addressof(word), ctypes.addressof(known), wanted, 5, 5):
                return True
        return False

    def take(self, slot, generation):
        """As a server does. False: a process before this one had handed the request on, and the server has it."""
        return self.change(slot, generation, HELD, ACCEPTED_BY_ONE, low=os.getpid(), kept=ASKED)

    def end(self, slot, generation):
        self.change(slot, generation, ACCEPTED_BY_ONE, ENDED_FOR_ALL)


def inherited(name):
    return socket.socket(fileno=int(os.environ[name]))


def receive(upstream):
    """One bundle: header fields as a list, the copy of the request, the client's socket as a number."""
    data, rights, _, _ = socket.recv_fds(upstream, HEADER.size + INLINE_BYTES, 2)
    if not data:
        sys.exit(0)  # the chain has ended
    fields = list(HEADER.unpack_from(data))
    request = data[HEADER.size :]
    if fields[3] & MEMORY_FILE:
        request = os.pread(rights[1], fields[8], 0)
    for extra in rights[1:]:
        os.close(extra)
    return fields, request, rights[0]


def send(downstream, fields, request, client):
    """Hands a request on; waits while the neighbour has too much unread."""
    fields[8] = len(request)
    rights = [client]
    if len(request) <= INLINE_BYTES:
        fields[3] &= ~MEMORY_FILE
        data = HEADER.pack(*fields) + request
    else:
        fields[3] |= MEMORY_FILE
        data = HEADER.pack(*fields)
        rights.append(os.memfd_create("request"))
        os.pwrite(rights[1], request, 0)
    socket.send_fds(downstream, [data], rights)
    for extra in rights[1:]:
        os.close(extra)


def notice(upstream, kind, slot, generation):
    upstream.send(NOTICE.pack(b"TGCF", 1, kind, 0, slot, generation), socket.MSG_DONTWAIT)


def with_field(fields, request, line):
    """The request with one more field line; from now on the copy is what the server reads."""
    head_bytes = fields[10]
    if not fields[3] & REWRITTEN:
        fields[3] |= REWRITTEN
        fields[9] = len(request)  # so many bytes on the socket are replaced
    request = request[: head_bytes - 2] + line + request[head_bytes - 2 :]
    fields[10] = head_bytes + len(line)
    return request


def refuse(client, status):
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    with socket.socket(fileno=os.dup(client)) as connection:
        try:
            connection.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            # What is unread at the close would turn it into a reset, which destroys the answer.
            while connection.recv(65536, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client is gone


def main():
    arguments = dict(part.split("=", 1) for part in "".join(sys.argv[1:2]).split(",") if "=" in part)
    line = f"X-Tag: {arguments.get('value', 'python')}\r\n".encode()
    forbidden = arguments.get("forbid", "").encode()
    ledger = Ledger(int(os.environ["TIDEGATE_CC_LEDGER"])) if forbidden else None
    upstream, downstream = inherited("TIDEGATE_CC_UPSTREAM"), inherited("TIDEGATE_CC_DOWNSTREAM")
    control = inherited("TIDEGATE_CC_CONTROL")
    control.send(b"R")  # ready
    while True:
        readable, _, _ = select.select([upstream, downstream, control], [], [])
        if control in readable and not control.recv(1):
            return
        if downstream in readable:
            data = downstream.recv(NOTICE.size)
            if not data:
                return
            upstream.send(data, socket.MSG_DONTWAIT)  # notices go on towards the client
        if upstream in readable:
            fields, request, client = receive(upstream)
            target = request.split(b" ", 2)[1] if request.count(b" ") > 1 else b""
            if forbidden and target.startswith(forbidden):
                presentation = fields[4], fields[5]
                if ledger.take(*presentation):
                    refuse(client, "403 Forbidden")
                    # Not before: whoever sees that it is over ends the connection.
                    ledger.end(*presentation)
                    notice(upstream, CLOSED_FOR_ALL, *presentation)
            else:
                send(downstream, fields, with_field(fields, request, line), client)
            os.close(client)


if __name__ == "__main__":
    main()
