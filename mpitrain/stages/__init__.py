"""Pipeline parallelism: a model's blocks divided into stages, and the schedules by which ranks compute them."""
