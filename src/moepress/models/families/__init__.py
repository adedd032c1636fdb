"""The adapters, most specific first. A family with the fused layout needs no entry."""

from moepress.models.adapter import Adapter
from moepress.models.fused import FusedAdapter

ADAPTERS: list[Adapter] = [FusedAdapter()]
