// torch brings this header under another path.
#pragma once
#include <ATen/dlpack.h>
