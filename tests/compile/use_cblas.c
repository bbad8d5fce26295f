/* KVC_USE_CBLAS: needs cblas.h and a library to link. */
#define KVC_USE_CBLAS 1
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main(void)
{
    return kvc_version() != KVC_VERSION;
}
