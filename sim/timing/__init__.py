"""How long a step takes. One file a timer; each is a `StepTimer` (`sim/plan.py`) and knows nothing of queues."""
