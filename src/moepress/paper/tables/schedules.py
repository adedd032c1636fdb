from moepress.paper.tables.base import PAPER, Quality, Row

PRINTED = {"linear": ("59.00", "73.83"), "quadratic": ("61.00", "73.92"), "cubic": ("67.00", "73.98")}

TABLE = Quality(
    name="schedules",
    title="How S is pruned while MC-SMoE trains",
    where="tab:comparision-schedules",
    columns=("COPA", "MultiRC"),
    ours="cubic",
    trains=True,
    rows=tuple(
        Row(name, PAPER | {"method": "mc-smoe"}, dict(zip(("COPA", "MultiRC"), printed, strict=True)), schedule=name)
        for name, printed in PRINTED.items()
    ),
)
