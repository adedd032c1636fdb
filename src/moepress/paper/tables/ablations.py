from moepress.paper.tables import alignment, averaging, similarities, uniform_adaptive
from moepress.paper.tables.base import Several

TABLE = Several(
    name="ablations",
    title="The ablations that need no training",
    parts=(uniform_adaptive.TABLE, similarities.TABLE, averaging.TABLE, alignment.TABLE),
)
