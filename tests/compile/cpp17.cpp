// The implementation as C++17, and a desc filled in the way of C++.
#define KVC_IMPLEMENTATION
#include "../../kvc.h"

int main()
{
    kvc_model *model = nullptr;
    kvc_model_desc desc = {};
    kvc_error err = {};
    desc.path = "";
    return kvc_model_open(&model, &desc, &err) == KVC_OK || model != nullptr || !err.message[0];
}
