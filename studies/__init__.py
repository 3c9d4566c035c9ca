"""Studies: figures of papers and of our own, which are not installed with the package.

`edgegossip study NAME` finds them in a clone of the repository; `edgegossip study
studies/FILE.py:FUNCTION` works from anywhere.
"""

STUDIES = {
    "edgegossip/fig3": "aggregation",
    "edgegossip/fig5": "training",
    "edgegossip/fig6": "training",
    "edgegossip/fig7": "aggregation",
    "edgegossip/fig8": "look_cost",
    "edgegossip/fig12": "training",
    "edgegossip/fig13": "training",
    "edgegossip/speedup": "speedup",
    "edgegossip/selections": "speedup",
    "edgegossip/ablations": "ablations",
    "edgegossip/skew": "speedup",
    "edgegossip/contention": "speedup",
    "edgegossip/rates": "tuned_races",
    "sparse-push/table-iid": "compressed_push",
    "sparse-push/table-skew": "compressed_push",
    "sparse-push/time-varying": "compressed_push",
    "sparse-push/controls": "rare_exchanges",
    "sparse-push/cifar10": "cifar10_pushes",
    "sparse-push/consensus": "consensus",
    "systems/table": "systems",
    "environments/waiting": "waiting",
    "environments/parts": "squeezed_parts",
    "language/authors": "language_models",
    "robustness/attacks": "robustness",
    "synthetic-gradients/methods": "stages",
    "synthetic-gradients/links": "stage_networks",
    "synthetic-gradients/stages": "stages",
    "synthetic-gradients/vgg16": "stages",
    "synthetic-gradients/cifar10": "stages",
    "synthetic-gradients/published": "published_modules",
    "adsp/tuning": "time_to_loss",
    "adsp/time-to-loss": "time_to_loss",
    "adsp/periods": "time_to_loss",
    "adsp/convergence": "time_to_loss",
    "adsp/heterogeneity": "time_to_loss",
    "adsp/delay": "time_to_loss",
    "adsp/bandwidth": "time_to_loss",
    "adsp/workers": "time_to_loss",
    "adsp/nonstationary": "time_to_loss",
    "adsp/search": "rate_search",
}
"""The module of each study; its function has the last part of the name."""
