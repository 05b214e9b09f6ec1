"""Plain TCP connections between the ranks: rounds without the waits of gloo's threads where cores are few.

    mesh.py       how ranks find and trust each other
    link.py       one connection: messages in and out
    pump.py       several of them at once, until all messages of a round are complete
    exchange.py   the usual round, one message each way, as one compiled call
    record.py     the memory of a connection that both of these share
    transport.py  the transport, and what it does when something goes wrong

The protocol, version 1
-----------------------
**Meeting.** The ranks are in a process group already, which can gather texts. Each rank listens on a port of the
kernel's choice and tells the others, as JSON: version, address, port, and what has failed so far. Rank 0 adds a secret
of 32 random bytes. Of two ranks the higher one calls. Three messages prove to both that the other has the secret:

    caller   "SPDL", version (u32), its rank (u32), 32 random bytes c         little-endian
    called   32 random bytes d, HMAC-SHA256(secret, "answer", "SPDL", version, caller, called, c, d)
    caller   HMAC-SHA256(secret, "call", "SPDL", version, caller, called, c, d)

Who says anything else is a stranger and is hung up on. In the end all ranks gather who could not be reached; if anybody
could not, nobody keeps a connection, and all raise `Unreachable`. That keeps strangers out; it hides nothing from those
who can read the network, as gloo does not either.

**Messages.** A message is a header of two signed 64-bit words in the machine's byte order, and the payload:

    length   of the payload in bytes, at most what the receiver has room for
    tag      bits 32 to 62: CRC-32 of the round's name, without its highest bit; bits 0 to 31: number of the message

Messages are numbered on each connection and in each direction, from 0, modulo 2**32. Receivers know from whom, in which
round and under which number the next one comes: anything else ends the run with a `ProtocolError`, before a byte of the
payload is read. No size travels ahead, nothing is acknowledged, and nothing beyond the expected message is read: what a
faster peer sends early waits in the kernel, whose buffers also slow it down.

**Leaving.** A rank that gives up sends each peer, except one to which it owes the rest of a message, a header with
length -1 and, in the tag's place, the rank because of which it leaves; then it closes. So those who only waited for it
learn who is to blame, and all ranks name the same one. A connection that just ends is blamed on the peer itself.

**Waiting.** A round fails when nothing at all has moved for the timeout. Where ranks share cores, waits block at once:
looking again for even a few microseconds takes the core from the rank that is waited for. A rank with a core of its own
looks a few times first: being woken takes longer than a message.
"""

from spardl.transport.direct.mesh import Unreachable
from spardl.transport.direct.transport import DirectTransport

__all__ = ["DirectTransport", "Unreachable"]
