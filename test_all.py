"""Every test of ringblock: pytest test_all.py. Tests on real graphs skip without ../shared/data."""

from importlib import import_module

import pytest

pytest.register_assert_rewrite("tests")
pytest_plugins = ["tests.parallel"]

PARTS = """conftest test_sampler test_features test_cache test_plan test_layers test_model test_step_graph
test_streams test_loader test_store test_sources test_public test_tables test_disk test_build test_metrics
test_train test_ddp test_link test_checkpoint test_report test_accuracy test_edges test_types test_node_types test_bench
test_house"""
for _part in PARTS.split():  # in this order: what runs beside the others is asked for late
    _names = vars(import_module(f"tests.{_part}"))
    globals().update({name: _names[name] for name in _names if not name.startswith("__")})
