"""Passes packets between two interfaces after a fixed time.

  python relay.py INTERFACE INTERFACE SECONDS

Adds a delay to a link where the kernel has no netem. Prints a line when it is
ready and ends when its standard input ends.
"""

import collections
import select
import socket
import struct
import sys
import time

# From <linux/if_packet.h> and <linux/if_ether.h>; Python names none of them.
_SOL_PACKET = 263
_ADD_MEMBERSHIP, _PROMISCUOUS = 1, 1
_VNET_HDR = 15  # Packets of 64 KiB pass whole, with their offload header.
_IGNORE_OUTGOING = 23  # Otherwise packets sent here would be read back.
_ALL_PROTOCOLS = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 1 << 26
_MAX_BYTES = 70_000
_BURST = 32  # Packets read in a row before any is sent.
_IDLE_S = 0.05


def open_port(interface: str) -> socket.socket:
  """Opens an interface for whole packets to any address."""
  port = socket.socket(
    socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)
  )
  port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
  port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
  for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
    port.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
  index = socket.if_nametoindex(interface)
  member = struct.pack("iHH8s", index, _PROMISCUOUS, 0, b"")
  port.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
  port.bind((interface, _ALL_PROTOCOLS))
  port.setblocking(False)
  return port


def main(argv: list[str]) -> None:
  """Relays packets until standard input ends."""
  ports = [open_port(name) for name in argv[1:3]]
  delay_s = float(argv[3])
  other = {ports[0].fileno(): ports[1], ports[1].fileno(): ports[0]}
  by_number = {port.fileno(): port for port in ports}
  poll = select.epoll()
  for number in (*by_number, sys.stdin.fileno()):
    poll.register(number, select.EPOLLIN)
  queue: collections.deque = collections.deque()
  print("ready", flush=True)
  while True:
    wait = _IDLE_S
    if queue:
      wait = min(wait, max(0.0, queue[0][0] - time.monotonic()))
    for number, _ in poll.poll(wait):
      if number not in by_number:
        return
      for _ in range(_BURST):
        try:
          packet = by_number[number].recv(_MAX_BYTES)
        except BlockingIOError:
          break
        queue.append((time.monotonic() + delay_s, other[number], packet))
    while queue and queue[0][0] <= time.monotonic():
      _, port, packet = queue.popleft()
      # TCP resends packets that do not fit.
      try:
        port.send(packet)
      except OSError:
        continue


if __name__ == "__main__":
  main(sys.argv)
