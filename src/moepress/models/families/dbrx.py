"""DBRX: all experts under each other in flat 2-D parameters; the block makes the choice."""

from moepress.models.adapter import Block, resized
from moepress.models.layer import CompactSpec, ExpertBank
from moepress.models.linear_router import LinearRouterAdapter
from moepress.runtime.factored import FactoredGlu, factors_of


class DbrxAdapter(LinearRouterAdapter):
    name = "dbrx"
    factored_form = FactoredGlu

    def matches(self, block: Block) -> bool:
        experts = getattr(block, "experts", None)
        mlp = getattr(experts, "mlp", None)
        stored = all(getattr(mlp, name, None) is not None for name in ("w1", "v1", "w2"))
        return mlp is not None and (stored or factors_of(experts) is not None)

    def drop_native(self, block: Block) -> None:
        del block.experts.mlp.w1, block.experts.mlp.v1, block.experts.mlp.w2

    def native_bank(self, block: Block) -> ExpertBank:
        mlp = block.experts.mlp
        shape = (-1, mlp.ffn_hidden_size, mlp.hidden_size)
        return ExpertBank(
            gate_EFD=mlp.w1.data.view(shape),
            up_EFD=mlp.v1.data.view(shape),
            down_EDF=mlp.w2.data.view(shape).transpose(1, 2),
            activation=lambda gate_TF, up_TF: mlp.activation_fn(gate_TF) * up_TF,
        )

    def reshape_experts(self, block: Block, spec: CompactSpec) -> None:
        mlp = block.experts.mlp
        for name in ("w1", "v1", "w2"):
            old = getattr(mlp, name)
            setattr(mlp, name, resized(old, spec.physical * mlp.ffn_hidden_size, old.shape[1]))
        mlp.moe_num_experts = block.experts.num_experts = spec.physical

    def router_returns_indices(self, block: Block) -> bool:
        return False
