// Nothing that the host needs.
#pragma once

#include "tests/network/fake/device_code.h"
