/* One of two translation units: it only uses the API. The other has the implementation. */
#include "../../kvc.h"

unsigned version_seen_by_b(void);

int main(void)
{
    return kvc_version() != KVC_VERSION || version_seen_by_b() != KVC_VERSION;
}
