#!/bin/sh
# What the image consists of, as a script, so that it can be tried without a container:
#
#     deploy/install.sh /opt/edgegossip
#
# It makes a virtual environment with PyTorch for CPUs, this clone's package and the tested versions
# of everything else, and writes what it holds into sbom.json (CycloneDX). An empty TORCH_INDEX
# takes PyTorch from pip's usual index.
set -eu
prefix=$1
source=$(cd "$(dirname "$0")/.." && pwd)
index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

python3 -m venv "$prefix"
pip="$prefix/bin/pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile"
$pip "$(grep '^torch==' "$source/constraints.txt")" ${index:+--index-url "$index"}
$pip --constraint "$source/constraints.txt" "$source[metrics]"

tools=$(mktemp -d)
python3 -m venv "$tools"
"$tools/bin/pip" --disable-pip-version-check install --quiet cyclonedx-bom==7.5.0
"$tools/bin/cyclonedx-py" environment --output-reproducible --output-file "$prefix/sbom.json" \
    "$prefix/bin/python"
rm -r "$tools"

# Nobody installs anything into a finished image.
"$prefix/bin/pip" --disable-pip-version-check uninstall --quiet --yes pip
