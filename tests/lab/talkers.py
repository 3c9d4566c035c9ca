"""Programs for hosts of the lab that use the transport alone, without training."""

PREPARE = """
import sys, threading, time
from edgegossip.net.address import Address
from edgegossip.net.zenoh.transport import ZenohTransport

rank, lease, *addresses = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
endpoints = [f"tcp/{address}:7447" for address in addresses]
others = [other for other in range(len(addresses)) if other != rank]
transport = ZenohTransport(
    run="lab",
    rank=rank,
    num_workers=len(addresses),
    address=Address(
        listen=(endpoints[rank],), connect=tuple(endpoints[other] for other in others)
    ),
    insecure=True,
    lease=lease,
)

def talk_to_all():
    for other in others:
        threading.Thread(target=talk, args=(other,), daemon=True).start()
"""
"""Takes rank, lease and the addresses of all; whoever goes on defines `talk`."""
