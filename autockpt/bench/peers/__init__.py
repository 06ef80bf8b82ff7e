"""What autockpt is measured against: one file per way of doing it, and the table of them all."""

from autockpt.bench.peers.base import OURS, PLAIN, Context, Detach, Peer
from autockpt.bench.peers.by_layer import BY_LAYER
from autockpt.bench.peers.by_op import OpSets
from autockpt.bench.peers.compiled import MemoryBudget, RecomputeAllCompiled
from autockpt.bench.peers.ours import Ours, OursInCompiledLayers, OursInCompiledModel
from autockpt.bench.peers.sac_ilp import SacIlp
from autockpt.bench.peers.save_on_cpu import SaveOnCpu

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        *BY_LAYER,
        OpSets(),
        SaveOnCpu(),
        SacIlp(),
        MemoryBudget(),
        RecomputeAllCompiled(),
        Ours(),
        OursInCompiledLayers(),
        OursInCompiledModel(),
    )
}
OUR_OWN: dict[str, Ours] = {name: peer for name, peer in PEERS.items() if isinstance(peer, Ours)}
