/* The other: includes the header plainly first, as through another header, then implements it. */
#include "../../kvc.h"
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

unsigned version_seen_by_b(void);

unsigned version_seen_by_b(void)
{
    return kvc_version();
}
