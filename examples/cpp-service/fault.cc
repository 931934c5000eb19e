#include "fault.h"

#include <cstdio>
#include <headport/headport.hpp>

namespace service {

Fault fault_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Fault& fault) {
    return fault;
  } catch (const headport::Error& fault) {
    switch (fault.status()) {
      case HEADPORT_PROMPT_ERROR:
      case HEADPORT_REQUEST_ERROR:
        return wrong_request(fault.what());
      case HEADPORT_NON_FINITE_ERROR:
        return Fault(500, "model_error", fault.what());
      case HEADPORT_UNSUPPORTED:
        return Fault(501, "not_supported_error", fault.what());
      default:
        return Fault(500, "server_error", fault.what());
    }
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "a request failed: %s\n", fault.what());
  } catch (...) {
    std::fprintf(stderr, "a request failed: an exception of an unknown type\n");
  }
  return Fault(500, "server_error", "the service failed on this request; its log tells why");
}

}  // namespace service
