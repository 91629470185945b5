"""What ``bench_ray_serve.py`` and the tests of ``examples/ray_serve`` are made of."""
