// In place of the header that the build generates.
#pragma once
#define CK_VERSION "0"
