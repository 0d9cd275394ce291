#!/usr/bin/env python3
"""A filter in Python: marks each request with a field, and refuses what is asked for under a path.

tidegate condition --listen :8080 --filter persist --filter ./tag.py=value=seen,forbid=/private -- COMMAND...

Nothing is needed but the standard library. The protocol is described in docs/protocol/filter.md.
"""

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
                refuse(client, "403 Forbidden")
                notice(upstream, CLOSED_FOR_ALL, fields[4], fields[5])
            else:
                send(downstream, fields, with_field(fields, request, line), client)
            os.close(client)


if __name__ == "__main__":
    main()
