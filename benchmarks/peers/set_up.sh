#!/bin/sh
# Makes an environment for each peer:   benchmarks/peers/set_up.sh FOLDER
# PyTorch comes first, and again with the peer, so that nothing replaces it. PYTHON: 3.11 or newer.
set -eu
cd "$1"
for peer in "gossipy gossipy-dfl==0.0.1" "flower flwr[simulation]==1.42.0"; do
    name=${peer%% *}
    "${PYTHON:-python3}" -m venv "$name"
    "$name/bin/pip" install --quiet torch==2.13.0
    "$name/bin/pip" install --quiet torch==2.13.0 psutil "${peer#* }"
done
