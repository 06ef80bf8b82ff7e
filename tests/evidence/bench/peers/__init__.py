"""What autockpt is measured against: one file per way of doing it, and the table of them all."""

from tests.evidence.bench.peers.base import OURS, PLAIN, Context, Detach, Peer
from tests.evidence.bench.peers.by_layer import BY_LAYER
from tests.evidence.bench.peers.by_op import OpSets
from tests.evidence.bench.peers.by_part import NamedParts
from tests.evidence.bench.peers.by_remat import Remat
from tests.evidence.bench.peers.compiled import MemoryBudget, RecomputeAllCompiled
from tests.evidence.bench.peers.ours import Ours, OursInCompiledLayers, OursInCompiledModel
from tests.evidence.bench.peers.sac_ilp import SacIlp
from tests.evidence.bench.peers.save_on_cpu import InputsOnCpu, SaveOnCpu, TrlOffload

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        *BY_LAYER,
        OpSets(),
        NamedParts(),
        Remat(),
        SaveOnCpu(),
        InputsOnCpu(),
        TrlOffload(),
        SacIlp(),
        MemoryBudget(),
        RecomputeAllCompiled(),
        Ours(),
        OursInCompiledLayers(),
        OursInCompiledModel(),
    )
}
OUR_OWN: dict[str, Ours] = {name: peer for name, peer in PEERS.items() if isinstance(peer, Ours)}
